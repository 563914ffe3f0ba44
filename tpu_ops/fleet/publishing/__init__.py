"""The published snapshot, for people without cloud credentials: format, sources and destinations."""
