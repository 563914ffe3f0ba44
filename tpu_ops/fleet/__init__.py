"""The one view of a fleet: its snapshot and changes, targets, host variables, first contact and publishing."""
