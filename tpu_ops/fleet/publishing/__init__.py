"""The published snapshot, for people without cloud credentials: its format, and where it is read and written."""
