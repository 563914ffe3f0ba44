"""The protocol between the controller and the launcher: standard library, Python 3.8, no other imports of tpu_ops.

The controller imports these modules, and the launcher is built with them (`host/build.py`), so each rule exists once.
A launcher may still be older than its controller: requests carry the version of the protocol.
"""

#: Replaces typing.TYPE_CHECKING: importing typing would add some milliseconds to each request.
TYPE_CHECKING = False
