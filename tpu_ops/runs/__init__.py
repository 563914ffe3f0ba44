"""Training runs, as the controller handles them: check the workers, start a run, follow it and stop it."""
