"""The sans-IO core: sequences, the decode batch, plans, and the engine that both clocks drive."""
