"""Filter ``tree_files``: a folder on the controller as the file list of ``managed_files``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError


def tree_files(folder: str, destination: str, suffix: str = "", mode: str = "0644") -> list[Any]:
    """Return every text file below a folder of the controller as an entry for ``managed_files``.

    :param folder: folder on the controller
    :param destination: where its content goes on the host
    :param suffix: only files whose name ends so; all when empty
    :param mode: octal mode of each file
    :returns: entries ``path``, ``content``, ``mode``, sorted by path
    :raises AnsibleFilterError: the folder does not exist
    """
    root = Path(folder)
    if not root.is_dir():
        raise AnsibleFilterError(f"tree_files: there is no folder {folder!r} on the controller")
    return [
        {
            "path": f"{destination}/{path.relative_to(root)}",
            "content": path.read_text(encoding="utf-8"),
            "mode": mode,
        }
        for path in sorted(root.rglob(f"*{suffix}"))
        if path.is_file() and "__pycache__" not in path.parts
    ]


class FilterModule:
    """Offers the filter to Ansible."""

    def filters(self) -> dict[str, Any]:
        """Return the filters of this file by name."""
        return {"tree_files": tree_files}
