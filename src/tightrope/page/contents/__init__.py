"""From run folders to what the page shows."""
