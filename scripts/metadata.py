"""Complete the metadata of a build: README as the package's page, and addresses.

Where GitHub builds, it names the repository in its environment. README's relative
links and pictures then become absolute ones, since the page of the package stands
elsewhere. Any other build has README as it is, and no addresses.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE = re.compile(r"\]\((?!https?://|#)([^)]+)\)")


class Metadata(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in the fields that pyproject.toml calls dynamic."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        server = os.environ.get("GITHUB_SERVER_URL")
        repository = os.environ.get("GITHUB_REPOSITORY")
        if server and repository:
            home = f"{server}/{repository}"
            tag = os.environ.get("GITHUB_REF_NAME", "main")
            text = absolute(text, home, tag)
            metadata["urls"] = urls(home, repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def urls(home: str, repository: str) -> dict[str, str]:
    """Return the project's addresses, as a package index shows them."""
    owner, _, name = repository.partition("/")
    return {
        "Repository": home,
        "Documentation": f"https://{owner.lower()}.github.io/{name}/",
        "Changelog": f"{home}/blob/main/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }


def absolute(text: str, home: str, tag: str) -> str:
    """Return a page whose links and pictures lead into the repository at a tag."""

    def link(match: re.Match[str]) -> str:
        target = match[1]
        kind = "raw" if target.endswith(".png") else "blob"
        return f"]({home}/{kind}/{tag}/{target})"

    return _RELATIVE.sub(link, text)
