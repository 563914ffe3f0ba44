"""The settings of a fleet: `inventory/tpu_vm.yml` and the environment, each read once and converted to typed values.

The inventory plugin and the command line read the same file. A variable of the environment overrides the file, so that
a shell can use another endpoint or project without an edit of the file. Every error names the file and key, or the
variable, that caused it.
"""

from tpu_ops.config.find import find_file, fleet_option, here, load, load_file, nearest_file, read_file
from tpu_ops.config.read import PRIVATE_KEYS, ZONE, check_project, check_zone, from_data
from tpu_ops.config.settings import (
    FLEET_FILE,
    LOCAL_TIMEOUT,
    OWN_KEYS,
    PLUGIN_FLAGS,
    PLUGIN_KEYS,
    REQUEST_TIMEOUT,
    STATES,
    Filters,
    Settings,
    folder_of,
)

__all__ = [
    "FLEET_FILE",
    "LOCAL_TIMEOUT",
    "OWN_KEYS",
    "PLUGIN_FLAGS",
    "PLUGIN_KEYS",
    "PRIVATE_KEYS",
    "REQUEST_TIMEOUT",
    "STATES",
    "ZONE",
    "Filters",
    "Settings",
    "check_project",
    "check_zone",
    "find_file",
    "fleet_option",
    "folder_of",
    "here",
    "from_data",
    "load",
    "load_file",
    "nearest_file",
    "read_file",
]
