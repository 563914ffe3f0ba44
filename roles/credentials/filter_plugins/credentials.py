"""Filters that check credentials and insert their secrets; no side effects, and no secret in their messages."""

from __future__ import annotations

import re
from typing import Any

Entry = dict[str, Any]

#: Kind of an entry -> the fields that it needs in addition to person and kind.
NEEDS: dict[str, tuple[str, ...]] = {
    "wandb": ("secret",),
    "huggingface": ("secret",),
    "aws": ("secret", "login"),
    "git": ("secret", "login", "host"),
    "netrc": ("secret", "login", "host"),
    "file": ("secret", "path"),
}

#: The netrc entry in which the Weights & Biases client looks for the API key: the host of its server
#: (https://docs.wandb.ai, wandb login), and the login `user`.
WANDB = {"host": "api.wandb.ai", "login": "user"}

#: Fields that can be read from an environment variable of the controller -> the option that names this variable.
FROM_ENV = {"secret": "from_env", "login": "login_from_env", "session_token": "session_token_from_env"}

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:(?P<port>[0-9]{1,5}))?")

#: Characters that every program which reads netrc, ~/.git-credentials or ~/.aws/credentials accepts within one word.
WORD = re.compile(r"[!$%&'()*+,./0-9:;<=>?@A-Z\[\]^_`a-z{|}~-]+")


def credentials_variables(entries: list[Entry]) -> list[str]:
    """Return the names of all environment variables from which credentials_entries reads values."""
    return sorted({str(entry[option]) for entry in entries for option in FROM_ENV.values() if entry.get(option)})


def resolved(entry: Entry, environment: dict[str, str]) -> Entry:
    """Return an entry with the values from its environment variables and with the defaults of its kind."""
    found = dict(entry)
    for field, option in FROM_ENV.items():
        if name := found.pop(option, ""):
            found[field] = environment.get(str(name), "")
    if found.get("kind") == "wandb":
        found = found | {"host": found.get("host") or WANDB["host"], "login": WANDB["login"]}
    return found


def place(entry: Entry) -> tuple[str, ...]:
    """Return what identifies the credential that an entry writes, which must be unique: person, file, key, login."""
    kind = entry.get("kind")
    file = "netrc" if kind in ("wandb", "netrc") else str(kind)
    key = {"netrc": "host", "git": "host", "aws": "profile", "file": "path"}.get(file, "")
    default = "default" if key == "profile" else ""
    # The login is a part of the key for git, since ~/.git-credentials can have several logins for one host.
    login = str(entry.get("login")) if file == "git" else ""
    return (str(entry.get("person")), file, str(entry.get(key) or default), login)


def source_faults(entry: Entry, environment: dict[str, str]) -> list[str]:
    """Return the faults of an entry's options that name environment variables, such as from_env."""
    faults = []
    for field, option in FROM_ENV.items():
        name = str(entry.get(option) or "")
        if name and entry.get(field):
            faults.append(f"both {field} and {option} are given; remove one of the two")
        elif name and not VARIABLE.fullmatch(name):
            faults.append(f"{option} is not the name of an environment variable; give only its name, such as HF_TOKEN")
        elif name and not environment.get(name):
            faults.append(
                f"{option}: the environment variable {name} is not set or is empty on the controller; export it"
            )
    return faults


def missing(name: str) -> str:
    """Return the message for a missing field; it names the field's option for an environment variable, if any."""
    return f"{name} is missing; add it" + (
        f", or name an environment variable in {FROM_ENV[name]}" if name in FROM_ENV else ""
    )


def value_faults(entry: Entry) -> list[str]:
    """Given the result of `resolved`, return the faults of the entry's values."""
    kind = str(entry.get("kind"))
    faults = [missing(name) for name in NEEDS.get(kind, ()) if not entry.get(name)]
    if kind != "file":
        for name in ("secret", "login", "session_token"):
            if entry.get(name) and not WORD.fullmatch(str(entry[name])):
                faults.append(f'{name} contains a space, a line end, ", #, \\ or a non-ASCII character; remove these')
    host, path, profile = (str(entry.get(name) or "") for name in ("host", "path", "profile"))
    named = HOST.fullmatch(host)
    if host and not (named and 0 < int(named["port"] or 443) < 65536):
        faults.append(f"host '{host}' is not a host name, optionally with a colon and a port")
    if path and (path.startswith(("/", "~")) or ".." in path.split("/") or path.endswith("/") or "\0" in path):
        faults.append(f"path '{path}' is not a path below the home; give one such as .config/token")
    if not re.fullmatch(r"[A-Za-z0-9._@+-]*", profile):
        faults.append(f"profile '{profile}' contains something other than letters, digits and . _ @ + -")
    return faults


def credentials_faults(entries: list[Entry], environment: dict[str, str], accounts: list[str]) -> list[str]:
    """Return every fault of credentials_entries.

    Args:
        entries: credentials_entries.
        environment: The controller's environment variables.
        accounts: The accounts that the worker has once site.yml has run.
    """
    faults = []
    places = [place(resolved(entry, environment)) for entry in entries]
    for position, entry in enumerate(entries):
        person = entry.get("person")
        where = f"credentials_entries[{position}]: {entry.get('kind')} of {person}"
        if places[position] in places[:position]:
            shared = " ".join(places[position][1:3]).strip()
            faults.append(
                f"{where}: an earlier entry of this person also writes {shared}; remove one of the two entries"
            )
        if entry.get("state", "present") == "absent":
            needed = {"git": ("host", "login"), "netrc": ("host",), "file": ("path",)}.get(str(entry.get("kind")), ())
            given = resolved(entry, environment)
            faults += [f"{where}: {missing(name)}" for name in needed if not given.get(name)]
            continue
        if not {person, "*"} & set(accounts):
            faults.append(
                f"{where}: {person} has no account and is not in users_people for this node; set person, or list"
                f" {person} for this node"
            )
        found = source_faults(entry, environment)
        given = resolved(entry, environment)
        lacking = {missing(field) for field, option in FROM_ENV.items() if entry.get(option)}
        found += [fault for fault in value_faults(given) if fault not in lacking]
        faults += [f"{where}: {fault}" for fault in found]
    return faults


def credentials_here(entries: list[Entry], elsewhere: list[str]) -> list[Entry]:
    """Return the entries for this worker: not those with state present of people who belong on other nodes only."""
    return [
        entry for entry in entries if entry.get("person") not in elsewhere or entry.get("state", "present") == "absent"
    ]


def credentials_resolved(entries: list[Entry], environment: dict[str, str]) -> list[Entry]:
    """Return the entries with their secrets, in the form of the module person_credentials."""
    fields = ("person", "kind", "secret", "host", "login", "session_token", "profile", "path", "state")
    found = [resolved(entry, environment) for entry in entries]
    return [{name: entry[name] for name in fields if entry.get(name)} for entry in found]


class FilterModule:
    """Filters of the role credentials."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {
            "credentials_faults": credentials_faults,
            "credentials_here": credentials_here,
            "credentials_resolved": credentials_resolved,
            "credentials_variables": credentials_variables,
        }
