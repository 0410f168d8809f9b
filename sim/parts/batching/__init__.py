"""The shape of a step: who prefills, who decodes."""
