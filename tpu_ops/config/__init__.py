"""The settings of a fleet: `inventory/tpu_vm.yml` and the environment, read once, typed.

The inventory plugin and the command line read the same file. The environment wins over the file, so that a shell can
use another endpoint or project without editing it. Every error names the file and key, or the variable, that caused it.
"""

from tpu_ops.config.find import find_file, fleet_option, here, load, load_file, nearest_file, read_file
from tpu_ops.config.read import PRIVATE_KEYS, check_project, check_zone, from_data
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
