"""What the controller and the launcher say to each other: standard library, Python 3.8, imports nothing of tpu_ops.

The controller imports these modules, and the launcher is built with them (`host/build.py`), so each rule exists once.
A launcher may still be older than its controller: requests carry the version of the protocol.
"""

#: Replaces that of typing, whose import would take some milliseconds of each request.
TYPE_CHECKING = False
