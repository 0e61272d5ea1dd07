"""Models behind HTTP: requests grow together in one batch, and streams carry a chunk an event."""
