"""The view of a fleet that all commands share: snapshot, changes, targets, host variables, publishing."""
