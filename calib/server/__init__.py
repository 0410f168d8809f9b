"""Constants fitted to what a real server did: its requests' arrivals, first and last tokens, and tokens between."""
