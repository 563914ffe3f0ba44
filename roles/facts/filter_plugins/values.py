"""Filters that check plain values of any role's variables; no side effects, so that their tests are tables."""

from __future__ import annotations

import re
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

#: A package name by Debian Policy 5.6.1, optionally with the architecture and version of apt's syntax.
PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+(:[a-z0-9-]+)?(=[A-Za-z0-9.+:~*-]+)?")
#: A host name or an address.
SERVER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9]+)?")
#: tz's areas, those of its older names as well; names without an area are older ones, and UTC.
ZONE = re.compile(
    r"((Africa|America|Antarctica|Arctic|Asia|Atlantic|Australia|Brazil|Canada|Chile|Etc|Europe|Indian|Mexico|Pacific|US)"
    r"(/[A-Za-z0-9_+-]+)+|[A-Z][A-Za-z0-9_+-]+)"
)
#: Addresses that apt, pip and uv can fetch from. Schemes may be written in capitals (RFC 3986, 3.1).
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+]*:/\S*")
#: Addresses that a mirror can replace, including installation media (sources.list(5)).
SOURCE = re.compile(rf"{ADDRESS.pattern}|cdrom:\[[^\]\n]*\]\S*")
#: What git clones from (git-clone(1), GIT URLS): its protocols, in small letters alone, user@host:path, and a path. A
#: host can have the name of a protocol; a single slash after its colon means that the second was forgotten.
REMOTE = re.compile(
    r"(https?|ssh|git|git\+ssh|ssh\+git|ftps?)://[^/\s]+/\S*"
    r"|file:///\S.*"
    r"|/\S.*"
    r"|(?!(https?|ssh|git|ftps?|file):/)([^@:/\s]+@)?([^:/\s\[\]]+|\[[0-9A-Fa-f:.]+\]):(?!//|:)\S+"
)
#: An absolute path without spaces and without "..".
PATH = re.compile(r"(?!.*/\.\.(/|$))/\S+")
#: The largest number that a C program holds in a signed 32-bit integer.
LARGEST = 2**31 - 1
#: An older name: a system that lacks it, as Debian 13 does without tzdata-legacy, does not know all zones.
OLDER_ZONE = "US/Pacific"


def size_faults(values: dict[str, str], units: str) -> list[str]:
    """Given variables that are sizes, return those that are not a number, optionally with one of these units."""
    return [
        f"{name}: '{value}' is not a size; give a whole number above 0, optionally with one of {', '.join(units)},"
        " as in 500M"
        for name, value in values.items()
        if not re.fullmatch(rf"0*[1-9][0-9]*[{units}]?", str(value))
    ]


def number_faults(values: dict[str, int], least: int, most: int = LARGEST) -> list[str]:
    """Given variables that are numbers, return those that are out of range."""
    faults = []
    for name, value in values.items():
        if int(value) < least:
            faults.append(f"{name}: {value} is too small; give {least} or more")
        elif int(value) > most:
            faults.append(f"{name}: {value} is too large; give {most} or less")
    return faults


def path_faults(values: dict[str, str | list[str]], *optional: str) -> list[str]:
    """Given variables that are paths on a worker, or lists of them, return those that are not absolute.

    Args:
        values: By name.
        optional: Names of those that may be empty.
    """
    places = {
        place: path
        for name, value in values.items()
        for place, path in (
            {f"{name}[{position}]": path for position, path in enumerate(value)}
            if isinstance(value, list)
            else {name: value}
        ).items()
    }
    return [
        f"{place}: '{path}' is not an absolute path; start it with /, without spaces or .."
        for place, path in places.items()
        if not PATH.fullmatch(str(path)) and not (path == "" and place in optional)
    ]


def package_faults(names: list[str], variable: str) -> list[str]:
    """Given packages of the distribution, return those that cannot be package names."""
    return [
        f"{variable}[{position}]: '{name}' is not a package name; use lowercase letters, digits, +, - and .,"
        " optionally with :ARCHITECTURE or =VERSION"
        for position, name in enumerate(names)
        if not PACKAGE.fullmatch(str(name))
    ]


def package_names(packages: list[str]) -> list[str]:
    """Given packages as apt takes them, return their names: without :ARCHITECTURE and =VERSION."""
    return [re.split("[:=]", package)[0] for package in packages]


def server_faults(names: list[str], variable: str) -> list[str]:
    """Given servers, return those that are neither one name nor one address."""
    return [
        f"{variable}[{position}]: '{name}' is neither a host name nor an address; list each server separately"
        for position, name in enumerate(names)
        if not SERVER.fullmatch(str(name))
    ]


def address_faults(values: dict[str, str | dict[str, str]], *local: str) -> list[str]:
    """Given variables that are addresses, or mappings of addresses, return those that nothing can be fetched from.

    Empty ones are ignored. An address is not repeated: it may contain a password.

    Args:
        values: By name.
        local: Names of those that may be absolute paths as well.
    """
    places: dict[str, bool] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            places |= {
                f"{name}: {old}": bool(SOURCE.fullmatch(old) and ADDRESS.fullmatch(str(new)))
                for old, new in value.items()
            }
        elif value:
            places[name] = bool(ADDRESS.fullmatch(value) or (name in local and PATH.fullmatch(value)))
    return [
        f"{place}: is not an address without spaces, such as https://mirror.example.org/path"
        for place, right in places.items()
        if not right
    ]


def remote_faults(values: dict[str, str]) -> list[str]:
    """Given git remotes, which may be empty or contain a password, return those that git cannot clone."""
    return [
        f"{name}: is not of the form https://host/path, ssh://user@host/path, user@host:path or /path"
        for name, value in values.items()
        if value and not REMOTE.fullmatch(value)
    ]


def zone_faults(name: str, variable: str) -> list[str]:
    """Given a time zone or the empty string, return what is wrong with it, as far as this machine knows zones."""
    if not name or (ZONE.fullmatch(name) and (_is_zone(name) or not _is_zone(OLDER_ZONE))):
        return []
    return [f"{variable}: there is no time zone '{name}'; `timedatectl list-timezones` lists them"]


def _is_zone(name: str) -> bool:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True


class FilterModule:
    """Filters for all roles."""

    def filters(self) -> dict[str, object]:
        """Return the filters by name."""
        return {
            "address_faults": address_faults,
            "number_faults": number_faults,
            "package_faults": package_faults,
            "package_names": package_names,
            "path_faults": path_faults,
            "remote_faults": remote_faults,
            "server_faults": server_faults,
            "size_faults": size_faults,
            "zone_faults": zone_faults,
        }
