"""What happens between prefill and decode."""
