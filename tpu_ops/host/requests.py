"""Answers one request: reads the request, carries it out, and writes the answer."""

from __future__ import annotations

import importlib
import os
import sys

from tpu_ops.protocol import wire

from . import TYPE_CHECKING, actions, space
from .caller import Caller, Gone
from .person import asking
from .rights import require_right

if TYPE_CHECKING:
    from typing import Any, Callable, Dict

    from .store import Store

_ACTIONS: Dict[str, Callable[[Dict[str, Any], Store], Dict[str, Any]]] = {
    "probe": actions.probe,
    "status": actions.status,
}
#: Further such actions: functions and modules of these names, imported late, since few requests need them.
_MODULES = ("activity", "report", "stacks", "usage")
#: Actions that wait for something, and that end early if the caller has gone.
_WAITING: Dict[str, Callable[[Dict[str, Any], Store, Caller], Dict[str, Any]]] = {
    "start": actions.start,
    "stop": actions.stop,
}


def _carried_out(request: Dict[str, Any], store: Store, caller: Caller) -> Dict[str, Any]:
    """Carry out the action of a request; return the answer.

    Raises:
        Refused: The action does not exist, or refuses the request.
        Gone: The caller has gone.
    """
    name = request["action"]
    if name in _WAITING:
        return _WAITING[name](request, store, caller)
    if name in _ACTIONS:
        return _ACTIONS[name](request, store)
    if name in ("holders", "unlock"):
        from . import chips  # imported late, since only these two requests need it

        return chips.holders(request, store) if name == "holders" else chips.unlock(request, store, caller)
    if name in _MODULES:
        module = importlib.import_module("." + name, __package__)
        answered: Dict[str, Any] = getattr(module, name)(request, store)
        return answered
    if name == "profile":
        from . import profile  # imported late, since only this request needs it

        return profile.profile(request, store, caller)
    if name in ("server_start", "server_stop"):
        from . import servers  # imported late, since only these two requests need it

        return servers.start(request) if name == "server_start" else servers.stop(request)
    raise wire.Refused("invalid", "{} {!r}".format(wire.UNKNOWN_ACTION, name))


def _not_taken(exc: OSError, store: Store) -> wire.Refused:
    """Return the error for a request whose files cannot be written.

    An error of a write, unlike that of an open, has no file name: the message then names the directories that are full.
    """
    full = [path for path in (store.run_dir, store.runs_dir) if space.is_full(path)]
    where = [os.fsdecode(exc.filename)] if exc.filename else full or [store.run_dir, store.runs_dir]
    text = "the launcher cannot write to {}: {}".format(" or ".join(where), space.why(exc, where))
    return wire.Refused("failed", text, space.fix(exc, where))


def serve(store: Store, source: int = 0, sink: int = 1) -> int:
    """Answer one request; return the exit code, which is 0 even if the answer is a refusal."""
    try:
        request = wire.read_request(source)
    except wire.Refused as refusal:
        sys.stderr.write("tpu-host: {}\n".format(refusal.message))
        return 2
    marker = request["marker"]
    try:
        require_right(asking())
        wire.check_request(request)
        if request["action"] == "follow":
            from . import follow

            follow.follow(request, store, Caller(source, attended=True), sink)
            return 0
        value = _carried_out(request, store, Caller(source, request.get("attended") is True))
    except wire.Refused as refusal:
        value = refusal.to_json()
    except (Gone, BrokenPipeError):
        return 0
    except Exception as exc:
        import traceback  # imported late: it takes half as long as all other imports

        if request["action"] == "follow":
            # Write no second answer: only frames can follow the first one. When the connection ends, the controller
            # asks again.
            sys.stderr.write("tpu-host: following failed:\n" + traceback.format_exc())
            return 1
        if isinstance(exc, OSError) and exc.errno in space.NOT_TAKEN:
            value = _not_taken(exc, store).to_json()
        else:
            text = "the launcher failed:\n" + traceback.format_exc()
            value = wire.Refused("failed", text).to_json()
    wire.answer(sink, marker, value)
    return 0
