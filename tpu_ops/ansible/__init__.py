"""Playbooks run by ansible-runner, and what they are given."""
