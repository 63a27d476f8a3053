"""Runs with the real vLLM: what its parser says of the configurations given as JSON on stdin."""

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path

from vllm_turing import service_args_check

with contextlib.redirect_stdout(sys.stderr):
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    facts: dict[str, object] = {
        "switch_on_only": sorted(
            option.removeprefix("--")
            for action in parser._actions
            if isinstance(action, argparse._StoreTrueAction)
            for option in action.option_strings
            if option.startswith("--")
        ),
        "read": {},
        "problems": {},
    }
    for name, text in json.load(sys.stdin).items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "vllm.yaml"
            path.write_text(text)
            facts["read"][name] = parser.load_config_file(str(path))  # type: ignore[index]  # both values are mappings
        facts["problems"][name] = service_args_check._check(text)["problems"]  # type: ignore[index]  # see above
print(json.dumps(facts))
