"""Ask for FlashQLA's kernels where there is no FlashQLA; JSON on stdout."""

from __future__ import annotations

import json

from vllm.model_executor.layers.mamba.ops import gdn_flashqla_legacy


def main() -> None:
    try:
        gdn_flashqla_legacy.load_flashqla_legacy()
        print(json.dumps({"error": ""}))
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))


if __name__ == "__main__":
    main()
