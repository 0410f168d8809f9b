"""Where a victim's KV goes, and how it comes back."""
