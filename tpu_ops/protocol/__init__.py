"""The protocol between controller and launcher. It uses only the standard library, for Python 3.8 and later.

The controller imports these modules, and the launcher is built with them (`host/build.py`), so each rule exists once.
A launcher may still be older than its controller: requests carry the version of the protocol.
"""

#: Used instead of typing.TYPE_CHECKING, since importing typing takes some milliseconds of each request.
TYPE_CHECKING = False
