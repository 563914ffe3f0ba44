"""Edits of the texts of files with credentials, one entry at a time; runs on Python 3.8."""

from __future__ import annotations

import re
from typing import Callable
from urllib.parse import quote, unquote

#: A function that, given a file's text, returns the text that should replace it.
Edit = Callable[[str], str]

#: The value after a keyword such as `login` in a netrc: quoted within its line, or up to the next space. A password may
#: begin with `#` or `"`.
ARGUMENT = re.compile(r'"(?:\\.|[^"\\\n])*"(?!\S)|\S+')
#: A word that is not such a value, or a comment, which begins with `#`.
WORD = re.compile(r"#[^\n]*|" + ARGUMENT.pattern)
PARTS = ("machine", "default", "macdef")
#: Matches a file's text that ends with an empty line, which ends a macdef.
MACRO_END = re.compile(r"\n\n\Z")
#: A line of ~/.git-credentials without a path after the host (credential_from_url of git): login and host.
WHOLE_HOST = re.compile(r"\s*https://([^:@/]*)(?::[^@/]*)?@([^/?#]+)/?\s*")
#: A line of ~/.git-credentials that git reads: it must have a login and a secret (credential_from_url_gently of git).
READ_BY_GIT = re.compile(r"[^:/\s][^:/]*://[^:@/?#]*:[^@/?#]*@.*")


def netrc_entries(text: str) -> list[tuple[int, int, list[str]]]:
    """Parse the text of a netrc into its entries (machine, default or macdef), each with start, end and words.

    The body of a macdef ends at the next empty line (the netrc of ftp(1)). Other entries end with the line of their
    last word.
    """
    parts: list[tuple[int, int, list[str]]] = []
    position, argument = 0, False
    while True:
        match = (ARGUMENT if argument else WORD).search(text, position)
        if match is None:
            return parts
        word = match[0]
        # If a keyword's value is missing at the end of a line, the next line's `machine` begins an entry and is not the
        # value.
        argument = argument and not (word in PARTS and "\n" in text[position : match.start()])
        position = match.end()
        if word.startswith("#") and not argument:
            continue
        end = position + 1 if text[position : position + 1] == "\n" else position
        if not argument and word in PARTS:
            if word == "macdef":
                blank = re.compile(r"\n[ \t]*\n").search(text, position)
                position = end = blank.end() if blank else len(text)
            parts.append((match.start(), end, [word]))
        elif parts:
            start, _, words = parts[-1]
            bare = word[1:-1] if word.startswith('"') and word.endswith('"') and len(word) > 1 else word
            parts[-1] = (start, end, [*words, bare])
        argument = not argument and word in ("machine", "login", "account", "password")


def netrc_edit(host: str, login: str | None, secret: str | None) -> Edit:
    """Return the edit that gives a netrc one entry for a host, or, if `login` is None, removes the host's entries."""

    def edit(text: str) -> str:
        parts = netrc_entries(text)
        own = [part for part in parts if part[2][:2] == ["machine", host]]
        wanted = ["machine", host, "login", login, "password", secret]
        if login is not None and len(own) == 1 and own[0][2] == wanted:
            return text
        block = "" if login is None else "machine %s\n  login %s\n  password %s\n" % (host, login, secret)
        # The new entry replaces the old one in its position, or goes before `default`, since programs read nothing
        # after `default`.
        default = [part for part in parts if part[2][0] == "default"]
        where = min((start for start, _, _ in own + default), default=len(text))
        for start, end, _ in reversed(own):
            ended = max((each[1] for each in parts if each[1] <= start), default=0)
            before, after = text[:start], text[end:]
            text = (before if block and start == where else closed_up(before, ended, after)) + after
        before = text[:where]
        if block and before and not before.endswith("\n"):
            before += "\n"
        if block and [part[2] for part in netrc_entries(before)][-1:] == [["macdef"]] and not MACRO_END.search(before):
            before += "\n"
        return before + block + text[where:]

    return edit


def closed_up(before: str, ended: int, after: str) -> str:
    """Remove the empty lines between the text before a removed entry and a comment after that entry.

    Since Python 3.11, the module netrc rejects a file with an empty line before a comment.

    Args:
        before: The text before the removed entry.
        ended: The position in it at which the previous entry ends.
        after: The text after the removed entry.

    Returns:
        The new text before the removed entry.
    """
    gap = before[ended:]
    if "\n" not in gap or not after.lstrip(" \t").startswith("#"):
        return before
    kept = before[:ended] + gap.rstrip()
    return kept + ("\n" if kept and not kept.endswith("\n") else "")


def aws_edit(profile: str, values: dict[str, str | None]) -> Edit:
    """Return the edit that sets keys of a profile in ~/.aws/credentials; the value None removes a key.

    A profile that has no keys left is removed.
    """

    def edit(text: str) -> str:
        lines = text.splitlines()
        heads = [position for position, line in enumerate(lines) if line.lstrip().startswith("[")]
        start = next((head for head in heads if lines[head].partition("]")[0].strip(" [") == profile), None)
        wanted = {key: value for key, value in values.items() if value is not None}
        if start is None:
            if not wanted:
                return text
            lines += ([""] if lines and lines[-1].strip() else []) + ["[%s]" % profile]
            start, end = len(lines) - 1, len(lines)
        else:
            end = next((head for head in heads if head > start), len(lines))
        body, seen = [], set()
        for line in lines[start + 1 : end]:
            key = (
                line.partition("=")[0].strip().lower()
                if "=" in line and not line.lstrip().startswith(("#", ";"))
                else ""
            )
            if key not in values:
                body.append(line)
            elif key in wanted and key not in seen:
                seen.add(key)
                same = line.partition("=")[2].strip() == wanted[key]
                body.append(line if same else "%s = %s" % (key, wanted[key]))
        missing = ["%s = %s" % (key, wanted[key]) for key in values if key in wanted and key not in seen]
        # New keys are inserted before the blank lines at the profile's end, which separate it from the next profile.
        filled = len(body)
        while filled and not body[filled - 1].strip():
            filled -= 1
        body[filled:filled] = missing
        head = [] if not wanted and not any(line.strip() for line in body) else [lines[start]]
        after = lines[:start] + head + (body if head else []) + lines[end:]
        return "\n".join(after) + "\n" if any(line.strip() for line in after) else ""

    return edit


def whole_host(line: str) -> tuple[str, str]:
    """Given a line of ~/.git-credentials, return login and host; both empty if it has a path or git ignores it."""
    match = WHOLE_HOST.fullmatch(line)
    return (unquote(match[1]), match[2].lower()) if match else ("", "")


def passed_over(text: str) -> list[int]:
    """Given the text of ~/.git-credentials, return the numbers of lines that git ignores, except comments."""
    meant = {number: line for number, line in enumerate(text.split("\n"), 1) if line.strip() and line.strip()[0] != "#"}
    return [number for number, line in meant.items() if not READ_BY_GIT.fullmatch(line)]


def git_edits(host: str, login: str, secret: str | None) -> tuple[Edit, Edit]:
    """Return the edits of ~/.git-credentials (git-credential-store(1)) and ~/.gitconfig, to be made in this order.

    The first edit writes the line of this login on the host, or removes it if `secret` is None. Lines of other logins
    and lines with a path stay. The second edit makes git read the file as long as it has a line for the host.
    """
    wanted = [] if secret is None else ["https://%s:%s@%s" % (quote(login, safe=""), quote(secret, safe=""), host)]
    hosts_line = re.compile(r"https://([^/?#]*@)?%s([/?#]|\s*$)" % re.escape(host), re.IGNORECASE)
    left = ["placeholder until the first edit stores the host's remaining lines here"]

    def edit(text: str) -> str:
        lines = text.splitlines()
        own = [line for line in lines if whole_host(line) == (login, host.lower())]
        # The line is put first: git uses the first line that matches.
        after = lines if own == wanted else wanted + [line for line in lines if line not in own]
        left[:] = [line for line in after if hosts_line.match(line.strip())]
        return text if after is lines else "".join(line + "\n" for line in after)

    return edit, lambda text: helper_edit(host, wanted=bool(left))(text) if wanted or not left else text


def helper_edit(host: str, *, wanted: bool) -> Edit:
    """Return the edit of ~/.gitconfig that makes git read ~/.git-credentials for a host, or stop reading it."""
    section = '[credential "https://%s"]\n\thelper = store\n' % host

    def edit(text: str) -> str:
        if not wanted:
            return text.replace(section, "")
        return text if section in text else text + ("\n" if text and not text.endswith("\n") else "") + section

    return edit


def whole_edit(secret: str | None) -> Edit:
    """Return the edit that replaces a file's whole text by a secret; if `secret` is None, the edit empties the file."""
    return lambda _: "" if secret is None else secret if secret.endswith("\n") else secret + "\n"
