"""Filters that check plain values of any role's variables; no side effects, so that their tests are tables."""

from __future__ import annotations

import re
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

#: A package name (Debian Policy 5.6.1), optionally followed by architecture and version in apt's syntax.
PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+(:[a-z0-9-]+)?(=[A-Za-z0-9.+:~*-]+)?")
#: A host name or an IP address.
SERVER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9]+)?")
#: Time zones: the areas of the tz database, including older ones, and names without an area, which are UTC or older.
ZONE = re.compile(
    r"((Africa|America|Antarctica|Arctic|Asia|Atlantic|Australia|Brazil|Canada|Chile|Etc|Europe|Indian|Mexico|Pacific|US)"
    r"(/[A-Za-z0-9_+-]+)+|[A-Z][A-Za-z0-9_+-]+)"
)
#: URLs that apt, pip and uv can fetch from. Schemes may be written in capitals (RFC 3986, 3.1).
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+]*:/\S*")
#: URLs in apt's sources that a mirror can replace, including those of installation media (sources.list(5)).
SOURCE = re.compile(rf"{ADDRESS.pattern}|cdrom:\[[^\]\n]*\]\S*")
#: Remotes that git can clone from (git-clone(1), GIT URLS): lowercase protocols, user@host:path, and a path. A host can
#: have the name of a protocol, but a single slash after its colon counts as a URL with a missing second slash.
REMOTE = re.compile(
    r"(https?|ssh|git|git\+ssh|ssh\+git|ftps?)://[^/\s]+/\S*"
    r"|file:///\S.*"
    r"|/\S.*"
    r"|(?!(https?|ssh|git|ftps?|file):/)([^@:/\s]+@)?([^:/\s\[\]]+|\[[0-9A-Fa-f:.]+\]):(?!//|:)\S+"
)
#: An absolute path without spaces and without "..".
PATH = re.compile(r"(?!.*/\.\.(/|$))/\S+")
#: The largest value of a signed 32-bit integer, in which C programs store these numbers.
LARGEST = 2**31 - 1
#: An older zone name. A system that does not know it has no older names at all, such as Debian 13 without
#: tzdata-legacy, so an unknown name is no fault there.
OLDER_ZONE = "US/Pacific"


def size_faults(values: dict[str, str], units: str) -> list[str]:
    """Given variables that are sizes, return a fault for each that is not a number or a number and a unit."""
    return [
        f"{name}: '{value}' is not a size; give a whole number above 0, optionally with one of {', '.join(units)},"
        " as in 500M"
        for name, value in values.items()
        if not re.fullmatch(rf"0*[1-9][0-9]*[{units}]?", str(value))
    ]


def number_faults(values: dict[str, int], least: int, most: int = LARGEST) -> list[str]:
    """Given variables that are numbers, return a fault for each that is out of range."""
    faults = []
    for name, value in values.items():
        if int(value) < least:
            faults.append(f"{name}: {value} is too small; give {least} or more")
        elif int(value) > most:
            faults.append(f"{name}: {value} is too large; give {most} or less")
    return faults


def path_faults(values: dict[str, str | list[str]], *optional: str) -> list[str]:
    """Given variables that are paths on a worker, or lists of paths, return a fault for each path that is not absolute.

    Args:
        values: Variable -> path or list of paths.
        optional: Names of the variables that may be empty.
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
    """Given packages of the distribution, return a fault for each that cannot be a package name."""
    return [
        f"{variable}[{position}]: '{name}' is not a package name; use lowercase letters, digits, +, - and .,"
        " optionally with :ARCHITECTURE or =VERSION"
        for position, name in enumerate(names)
        if not PACKAGE.fullmatch(str(name))
    ]


def package_names(packages: list[str]) -> list[str]:
    """Given packages in apt's syntax, return their names without :ARCHITECTURE and =VERSION."""
    return [re.split("[:=]", package)[0] for package in packages]


def server_faults(names: list[str], variable: str) -> list[str]:
    """Given a list of servers, return a fault for each that is neither one host name nor one IP address."""
    return [
        f"{variable}[{position}]: '{name}' is neither a host name nor an address; list each server separately"
        for position, name in enumerate(names)
        if not SERVER.fullmatch(str(name))
    ]


def address_faults(values: dict[str, str | dict[str, str]], *local: str) -> list[str]:
    """Given variables that are URLs or mappings of URLs, return a fault for each that nothing can be fetched from.

    Empty variables are ignored. The fault does not contain the URL, which may contain a password.

    Args:
        values: Variable -> URL or mapping of URLs.
        local: Names of the variables that may also be absolute paths.
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
        f"{place}: must be a URL without spaces, such as https://mirror.example.org/path"
        for place, right in places.items()
        if not right
    ]


def remote_faults(values: dict[str, str]) -> list[str]:
    """Given variables that are git remotes, return a fault, without the remote, for each that git cannot clone.

    Empty remotes are ignored. The fault does not contain the remote, which may contain a password.
    """
    return [
        f"{name}: is not of the form https://host/path, ssh://user@host/path, user@host:path or /path"
        for name, value in values.items()
        if value and not REMOTE.fullmatch(value)
    ]


def zone_faults(name: str, variable: str) -> list[str]:
    """Return the fault of a variable with a time zone, as far as the controller knows time zones."""
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
