"""Build the Ansible collection tpu_ops.fleet from this clone, for projects that are not a clone of it.

    python -m tools.collection [--output DIR]

The tree is copied to DIR/tpu_ops/fleet, and `ansible-galaxy collection build` makes DIR/tpu_ops-fleet-VERSION.tar.gz of
it, without a network. A collection has its plugins below plugins/ and not beside their role or playbook. Filters and
`module_defaults` need full names there. So these parts are moved and rewritten:

- library/, module_utils/, filter_plugins/ and action_plugins/ of roles and playbooks become directories of plugins/;
- imports of module_utils get the name of the collection;
- modules, actions and filters in tasks, variables, templates and playbooks become `tpu_ops.fleet.NAME`.

Roles keep their short names: Ansible looks for them in the collection of the role or playbook.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
NAMESPACE, NAME = "tpu_ops", "fleet"
#: Directories of a role or of playbooks/ -> directories below plugins/.
PLUGINS = {
    "library": "modules",
    "module_utils": "module_utils",
    "filter_plugins": "filter",
    "action_plugins": "action",
}
#: Suffixes of files in which Ansible evaluates templates.
TEMPLATES = (".yml", ".j2")
#: Directories of a role whose files have no tasks.
WITHOUT_TASKS = ("defaults", "templates", "vars")


def main(argv: Sequence[str] | None = None) -> int:
    """Build the collection and print the path of the archive."""
    parser = argparse.ArgumentParser(description="Build the Ansible collection tpu_ops.fleet.")
    parser.add_argument("--output", type=Path, default=ROOT / ".build" / "collection", metavar="DIR")
    args = parser.parse_args(argv)
    tree = args.output / NAMESPACE / NAME
    shutil.rmtree(tree, ignore_errors=True)
    lay_out(tree)
    galaxy = Path(sys.executable).parent / "ansible-galaxy"
    command = [galaxy, "collection", "build", "--force", "--output-path", args.output, tree]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
        return 1
    print(args.output / f"{NAMESPACE}-{NAME}-{version()}.tar.gz")
    return 0


def version() -> str:
    """Return the version of tpu_ops, which is also that of the collection."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def lay_out(tree: Path) -> None:
    """Write the tree of the collection to a new directory."""
    ignore = shutil.ignore_patterns("__pycache__", *PLUGINS)
    for part in ("roles", "playbooks"):
        shutil.copytree(ROOT / part, tree / part, ignore=ignore)
    shutil.copytree(ROOT / "inventory_plugins", tree / "plugins" / "inventory", ignore=ignore)
    own = list(plugins())
    utilities = [source.stem for source, kind in own if kind == "module_utils"]
    for source, kind in own:
        target = tree / "plugins" / kind / source.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            raise FileExistsError(f"{source.relative_to(ROOT)}: another role has a plugin of this kind and name")
        target.write_text(with_full_imports(source.read_text(), utilities))
    filters = [name for source, kind in own if kind == "filter" for name in filters_of(source)]
    modules = {source.stem for source, kind in own if kind in ("modules", "action")}
    for path in tree.rglob("*"):
        if path.suffix in TEMPLATES and "meta" not in path.parts:
            text = with_full_filters(path.read_text(), filters)
            path.write_text(text if path.parent.name in WITHOUT_TASKS else with_full_modules(text, modules))
    shutil.copy(ROOT / "LICENSE", tree)
    shutil.copy(ROOT / "CHANGELOG.md", tree)
    readme = Path(__file__).with_suffix(".md").read_text()
    (tree / "README.md").write_text(readme.replace("VERSION", version()))
    (tree / "meta").mkdir()
    (tree / "meta" / "runtime.yml").write_text(yaml.safe_dump({"requires_ansible": ">=2.19.0"}))
    (tree / "galaxy.yml").write_text(yaml.safe_dump(galaxy_facts(), sort_keys=False))


def galaxy_facts() -> dict[str, object]:
    """Return the content of galaxy.yml."""
    return {
        "namespace": NAMESPACE,
        "name": NAME,
        "version": version(),
        "readme": "README.md",
        "authors": ["The tpu_ops authors"],
        "description": "Inventory of Cloud TPU VMs and roles that configure them",
        "license": ["Apache-2.0"],
        "tags": ["cloud", "google", "tpu", "jax"],
        "dependencies": {},
    }


def plugins() -> Iterator[tuple[Path, str]]:
    """Yield each plugin of the roles and playbooks, and its directory below plugins/."""
    for owner in (*sorted((ROOT / "roles").iterdir()), ROOT / "playbooks"):
        for folder, kind in PLUGINS.items():
            for path in sorted((owner / folder).glob("*.py")):
                yield path, kind


def filters_of(plugin: Path) -> list[str]:
    """Return the names of the filters in a plugin of this clone."""
    module = importlib.import_module(".".join(plugin.relative_to(ROOT).with_suffix("").parts))
    return list(module.FilterModule().filters())


def with_full_imports(code: str, utilities: Sequence[str]) -> str:
    """Return Python code in which imports of these module_utils have the name of the collection."""
    own = rf"^(\s*from )ansible\.module_utils\.(?=({'|'.join(utilities)}) import\b)"
    package = f"ansible_collections.{NAMESPACE}.{NAME}.plugins.module_utils"
    return re.sub(own, rf"\1{package}.", code, flags=re.MULTILINE)


def with_full_filters(text: str, filters: Sequence[str]) -> str:
    """Return YAML or a template in which these filters have their full names, after `|` and as the first of `map`."""
    names = "|".join(filters)
    return re.sub(rf"(\|\s*|\bmap\(\s*['\"])(?=({names})\b)", rf"\1{NAMESPACE}.{NAME}.", text)


def with_full_modules(text: str, modules: Collection[str]) -> str:
    """Return YAML in which these modules have their full names, as keys of tasks and of `module_defaults`."""
    names = "|".join(sorted(modules))
    return re.sub(rf"^(\s*- |\s+)(?=({names}):(\s|$))", rf"\1{NAMESPACE}.{NAME}.", text, flags=re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main())
