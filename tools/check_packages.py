"""Check that the packages of tpu_ops import only what docs/architecture.md allows."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "tpu_ops"

#: Every package may import these parts of tpu_ops; but the launcher may import only the protocol.
LOWEST = {"errors", "protocol"}
#: Package or module -> further parts of tpu_ops that it may import.
ALLOWED: dict[str, set[str]] = {
    "protocol": {"protocol"},
    "host": {"host", "protocol"},
    "cloud": {"cloud", "files", "texts"},
    "files": set(),
    "lab": {"lab", "cloud.accelerators", "files"},
    "config": {"config", "cloud", "options", "files", "texts"},
    "options": set(),
    "ssh": {"ssh", "config", "cloud", "files", "texts"},
    "fleet": {"fleet", "ssh", "config", "cloud", "options", "files", "texts"},
    "ansible": {"ansible", "fleet", "ssh", "config", "cloud", "files", "texts"},
    "runs": {"runs", "ansible", "fleet", "ssh", "config", "cloud", "options", "files", "texts"},
    "recovery": {"recovery", "runs", "ansible", "fleet", "ssh", "config", "cloud", "options", "files", "texts"},
    "cli": {
        "cli",
        "recovery",
        "runs",
        "fleet",
        "ssh",
        "ansible",
        "lab",
        "config",
        "cloud",
        "options",
        "files",
        "texts",
    },
    "errors": set(),
    "texts": set(),
}
#: The only module of the package `cli` that may use the lab.
LAB_USERS = {"cli/lab.py"}
#: Places that must not mention the lab: a mention could be a special case for it.
LAB_BLIND = (
    "tpu_ops/cloud",
    "tpu_ops/fleet",
    "tpu_ops/ssh",
    "tpu_ops/ansible",
    "tpu_ops/runs",
    "tpu_ops/recovery",
    "tpu_ops/host",
    "tpu_ops/protocol",
    "tpu_ops/config",
    "tpu_ops/errors.py",
    "tpu_ops/files.py",
    "tpu_ops/options.py",
    "tpu_ops/texts.py",
)
LAB_BLIND_ANSIBLE = ("roles", "playbooks", "inventory_plugins", "site.yml")
LAB_WORD = re.compile(
    r"(?<!\w)(labs?|tpu-lab|TPU_OPS_LAB|is_lab|in_lab|/\.dockerenv|virtualization_type)(?!\w)", re.IGNORECASE
)


def imports_of(path: Path) -> set[str]:
    """Return the dotted names below tpu_ops that a module imports, including relative imports."""
    found: set[str] = set()
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for statement in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            base = ".".join(package[: len(package) - statement.level + 1]) if statement.level else ""
            module = ".".join(part for part in (base, statement.module) if part)
            found |= {f"{module}.{alias.name}" for alias in statement.names}
    return {name.removeprefix(f"{PACKAGE}.") for name in found if name.startswith(f"{PACKAGE}.")}


def room_of(path: Path) -> str:
    """Return the package of a module; for a module at the top of tpu_ops, its own name."""
    first = path.relative_to(ROOT / PACKAGE).parts[0]
    return first.removesuffix(".py")


def faults() -> list[str]:
    """Return one line for each forbidden import and each mention of the lab."""
    found = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        room, shown = room_of(path), path.relative_to(ROOT / PACKAGE).as_posix()
        if room == "__init__":
            continue
        allowed = ALLOWED[room] | (LOWEST if room not in {"host", "texts", *LOWEST} else set())
        if room == "cli" and shown not in LAB_USERS:
            allowed.discard("lab")
        for name in sorted(imports_of(path)):
            if name == "__version__" or any(name == entry or name.startswith(f"{entry}.") for entry in allowed):
                continue
            found.append(f"{PACKAGE}/{shown}: may not import {PACKAGE}.{name}")
    for top in (*LAB_BLIND, *LAB_BLIND_ANSIBLE):
        start = ROOT / top
        files = [start] if start.is_file() else sorted(start.rglob("*"))
        for path in files:
            if path.is_file() and path.suffix in {".py", ".yml", ".yaml", ".j2", ".md", ""}:
                for number, text in enumerate(path.read_text(errors="replace").splitlines(), 1):
                    if LAB_WORD.search(text):
                        found.append(f"{path.relative_to(ROOT)}:{number}: knows the lab: {text.strip()}")
    return found


if __name__ == "__main__":
    problems = faults()
    print("\n".join(problems) or "packages: every import is allowed")
    sys.exit(bool(problems))
