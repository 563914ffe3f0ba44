"""Training runs seen from the controller: preflight, launch, follow, stop."""
