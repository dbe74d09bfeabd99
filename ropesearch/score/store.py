"""Scores kept on disk under what they depend on, so that nothing is scored twice."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ropesearch.errors import InputError
from ropesearch.files import remove_leftovers, sha256_of_json, write_json
from ropesearch.score.score import Score


class ScoreStore:
    """A folder with one JSON file per score, named by the fingerprint of what the score depends on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        remove_leftovers(folder)

    def get(self, depends_on: Mapping[str, Any]) -> Score | None:
        """The score kept for exactly these JSON values, or None. A file that cannot be read counts as none."""
        try:
            return Score.from_json(json.loads(self._path(depends_on).read_bytes()))
        except (OSError, ValueError, InputError):
            return None

    def put(self, depends_on: Mapping[str, Any], score: Score) -> None:
        """Keep a score, in one step."""
        write_json(self._path(depends_on), score.to_json())

    def _path(self, depends_on: Mapping[str, Any]) -> Path:
        return self._folder / f"{sha256_of_json(depends_on)}.json"
