"""The ten operations of site.yml, for pyinfra."""

from pyinfra import host  # type: ignore[import-not-found]
from pyinfra.facts.server import Command  # type: ignore[import-not-found]
from pyinfra.operations import apt, files, server, systemd  # type: ignore[import-not-found]

apt.packages(name="Install a package", packages=["sudo"])
files.template(
    name="Write a file from a template",
    src="roles/ten/templates/ten.conf.j2",
    dest="/etc/ten.conf",
    user="root",
    group="root",
    mode="644",
    ten_size=512,
)
files.directory(name="Make a directory", path="/srv/ten", user="root", group="root", mode="755")
server.group(name="Make a group", group="ten")
server.user(name="Make a user", user="ten", group="ten")
files.line(name="Have a line in a file", path="/etc/environment", line="TEN=1")
files.put(
    name="Copy a file",
    src="roles/ten/files/ten-tmpfiles.conf",
    dest="/etc/tmpfiles.d/ten.conf",
    user="root",
    group="root",
    mode="644",
)
systemd.service(name="Have a service enabled and running", service="ssh.service", running=True, enabled=True)
files.link(name="Make a symbolic link", path="/opt/ten", target="/srv/ten", user="root", group="root")
# An operation would count as a change, a fact is only read.
host.get_fact(Command, "uname -r")
