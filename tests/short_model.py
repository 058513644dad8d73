"""A model that few documents fit into."""

import json
import shutil
from pathlib import Path


def shortened(model: Path, folder: Path) -> Path:
    """A copy with a context of 1,024 tokens."""
    made = folder / "short-model"
    shutil.copytree(model, made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return made
