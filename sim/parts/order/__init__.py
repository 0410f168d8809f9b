"""Who is next among those waiting."""
