"""Runs playbooks by ansible-runner, and prepares their environment."""
