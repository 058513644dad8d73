"""Text of scanned pages by RapidOCR (extra `ocr`; Apache-2.0, its models come with the package)."""

import os
from typing import Any

import pypdfium2

_DOTS_AN_INCH = 150
_LEAST_SCORE = 0.5


class PageReader:
    """Loads its models with the first page."""

    def __init__(self) -> None:
        self._engine: Any = None

    def read(self, page: pypdfium2.PdfPage) -> str:
        """Lines from top to bottom; the engine's own order where pages have columns."""
        if self._engine is None:
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # files are read side by side, a core each
            from rapidocr_onnxruntime import RapidOCR

            self._engine = RapidOCR(intra_op_num_threads=1, inter_op_num_threads=1)
        found, _ = self._engine(page.render(scale=_DOTS_AN_INCH / 72).to_numpy())
        return "\n".join(text for _, text, score in found or () if float(score) >= _LEAST_SCORE)
