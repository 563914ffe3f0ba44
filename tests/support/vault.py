"""Ansible Vault as its users have it: a password, and what is encrypted by it."""

from __future__ import annotations

from ansible.parsing.vault import VaultLib, VaultSecret

PASSWORD = "vault password of the test"


def vaulted(text: str) -> str:
    """Return a text as `ansible-vault encrypt` writes it."""
    encrypted: bytes = VaultLib([("default", VaultSecret(PASSWORD.encode()))]).encrypt(text)
    return encrypted.decode()
