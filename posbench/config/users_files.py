"""Check the files of a user's own folder (`--config-dir`, `hydra.searchpath`), which may be a stranger's.

A file may set posbench's own keys and nothing of Hydra's. Tags, aliases, calls, links and paths out of the folder are
refused. Every file that Hydra could read is checked before Hydra reads any.

This check and `data_only.refuse_other_hydra` are both needed. Only this one stops links, FIFOs, huge files and YAML
bombs, since the other one lets Hydra read first. Only the other one stops a file that Hydra reads in a way this one
does not foresee, such as a package line that Hydra cuts at 512 characters (found in 2026).
"""

import itertools
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import yaml

from posbench.config import plain_yaml
from posbench.config.shipped import GROUPS
from posbench.errors import UserError

_MOST_ENTRIES = 10_000  # files and folders
_MOST_BYTES = 64_000  # of one file: an experiment has some hundred, and this is half a second
_MOST_TOGETHER = 500_000  # bytes of all files
_KEY = re.compile(r"\$\{\.*\w[\w.-]*\}", re.ASCII)  # an interpolation that names another key
_ENTRY = re.compile(r"(optional +|override +)?/?\w[\w+=,. -]*(/\w[\w+=,. -]*)*(@[\w.]+)?")  # of a defaults list
_PACKAGE = re.compile(r"# *@package +(\w+(\.\w+)*)")
_WHOLE = "# @package _global_"


def refuse_all_but_settings(folder: Path) -> None:
    """Check every file that Hydra could read in a folder.

    Raises:
        UserError: a file does more than set posbench's keys (the first one, with its line), there is too much to be
            configurations, or there is no such folder.
    """
    if not folder.is_dir():
        raise UserError(f"no folder '{folder}' to read configurations from")
    together = 0
    for path in _yaml_files(folder):
        parts = path.relative_to(folder).with_suffix("").parts
        if any(part.lower() == "hydra" for part in parts):
            raise UserError(f"{path}: {_not_hydras('the name')}")
        text = plain_yaml.read_text(path, _MOST_BYTES)
        together += len(text)
        if together > _MOST_TOGETHER:
            raise UserError(f"{folder} has more than {_MOST_TOGETHER:,} bytes of YAML: expected configurations only")
        _refuse_more_than_settings(path, text)
        if parts[0] in GROUPS and len(parts) > 1:
            _refuse_no_settings(path, text, experiment=parts[0] == "experiment" and not parts[-1].startswith("_"))


def _yaml_files(folder: Path) -> Iterator[Path]:
    """The YAML files below a folder. Links are refused. Hidden folders are skipped: no defaults list can name them."""
    waiting, seen = [folder], 0
    while waiting:
        try:
            entries = sorted(os.scandir(waiting.pop()), key=lambda entry: entry.name)
        except OSError as error:
            raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
        seen += len(entries)
        if seen > _MOST_ENTRIES:
            raise UserError(f"{folder} holds more than {_MOST_ENTRIES:,} files: expected configurations only")
        for entry in entries:
            path, is_yaml = Path(entry.path), entry.name.lower().endswith(".yaml")
            kind = entry.stat(follow_symlinks=False).st_mode
            if entry.name.startswith(".") and not is_yaml:
                continue
            if stat.S_ISLNK(kind) and (is_yaml or path.is_dir()):
                raise UserError(f"{path} is a link: expected a file inside the configuration folder")
            if stat.S_ISDIR(kind):
                waiting.append(path)
            elif is_yaml and not stat.S_ISREG(kind):
                raise UserError(f"{path} is not a regular file: expected YAML text")
            elif is_yaml:
                yield path


def _refuse_more_than_settings(path: Path, text: str) -> None:
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(r"\s*#\s*@\s*package", line):
            found = _PACKAGE.fullmatch(line.strip())
            if not found:
                raise UserError(f"{path}, line {number}: cannot read '{line.strip()}', expected '{_WHOLE}'")
            if "hydra" in found[1].lower():  # anywhere: Hydra reads 512 characters, which can end within the name
                raise UserError(f"{path}, line {number}: {_not_hydras('a package')}")
    for event, is_key, of_defaults in _scalars(path, text):
        where, value = f"{path}, line {event.start_mark.line + 1}", event.value
        words = re.split(r"[^\w-]+", value.lower())
        if any(call in value for call in plain_yaml.CALLS):
            raise UserError(f"{where}: {value[:80]} is not allowed, a configuration is data only")
        if "hydra" in words and (is_key or of_defaults):
            raise UserError(f"{where}: {_not_hydras('a default' if of_defaults else 'a key')}")
        if is_key and value == "<<":
            raise UserError(f"{where}: '<<' is not allowed, a configuration is written out")
        if "${" in _KEY.sub("", value):
            called = f"'{value[:80]}' is not allowed"
            raise UserError(f"{where}: {called}, only other keys may be interpolated, such as ${{training.tokens}}")
        if of_defaults and value and not _ENTRY.fullmatch(value):
            raise UserError(f"{where}: the default '{value[:80]}' is not one of a group: expected such as 'model: gpt'")


def _scalars(path: Path, text: str) -> Iterator[tuple[yaml.ScalarEvent, bool, bool]]:
    """Every scalar of a file, whether it is a key, and whether it stands in a defaults list.

    Raises:
        UserError: anything but mappings and lists of plain scalars: tags, aliases, a second document, a key that is a
            collection.
    """
    open_ones: list[tuple[bool, bool]] = []  # enclosing collections: (is a mapping, is in a defaults list)
    is_key, of_defaults = False, False  # of the next event
    documents = 0
    for event in plain_yaml.events(path, text):
        where = f"{path}, line {event.start_mark.line + 1}"
        documents += isinstance(event, yaml.DocumentStartEvent)
        if documents > 1:
            raise UserError(f"{where}: a second document is not allowed, a configuration is one")
        if isinstance(event, yaml.AliasEvent):
            raise UserError(f"{where}: aliases are not allowed, a configuration is written out")
        if isinstance(event, yaml.NodeEvent) and event.tag is not None:
            raise UserError(f"{where}: the tag '{event.tag[:80]}' is not allowed, a configuration is data only")
        if isinstance(event, yaml.CollectionStartEvent):
            if is_key:
                raise UserError(f"{where}: expected a key, found a list or a mapping")
            open_ones.append((isinstance(event, yaml.MappingStartEvent), of_defaults))
        elif isinstance(event, yaml.CollectionEndEvent):
            open_ones.pop()
        elif isinstance(event, yaml.ScalarEvent):
            yield event, is_key, of_defaults
            if is_key:
                is_key, of_defaults = False, of_defaults or event.value == "defaults"
                continue
        is_key, of_defaults = open_ones[-1] if open_ones else (False, False)


def _refuse_no_settings(path: Path, text: str, experiment: bool) -> None:
    """Refuse a file that sets nothing, by its name; Hydra would only name a missing key."""
    if path.read_bytes().startswith(b"\xef\xbb\xbf"):
        raise UserError(f"{path} begins with a byte order mark, which hides its first line: save it as UTF-8 without")
    kinds = [type(event) for event in itertools.islice(plain_yaml.events(path, text), 3)]
    has_some = yaml.DocumentStartEvent in kinds
    package = _PACKAGE.fullmatch(text.strip().partition("\n")[0].strip())
    whole = package is not None and package[1].startswith("_global_")
    if not has_some and not package:
        raise UserError(f"{path} is empty: expected keys and values")
    if has_some and kinds[-1] is not yaml.MappingStartEvent:
        raise UserError(f"{path} is not keys and values: expected lines such as 'name: rope'")
    if experiment and not whole:
        raise UserError(f"{path} does not begin with '{_WHOLE}': without that line, an experiment sets nothing")


def _not_hydras(what: str) -> str:
    return f"{what} is Hydra's own, set on the command line only: a file sets posbench's keys"
