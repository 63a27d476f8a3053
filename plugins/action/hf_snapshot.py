"""Show how far a model is while a task waits for it.

The module answers after a few seconds whether the model is there or not; this asks again until it
is, and prints a line in between. So no connection is held for hours, and a lost one costs nothing.
"""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core ships no types
    """Run the module once, or until the model is there when ``state: present``."""

    # Seconds that the module waits before it answers, and so between two lines.
    QUIET = 10.0
    # Seconds for a host that does not answer, as while it reboots: the fetch goes on without us.
    AWAY = 300.0

    def run(
        self, tmp: str | None = None, task_vars: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the module's last answer.

        ``timeout`` (seconds, 0 for none) is this plugin's own argument.
        """
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        timeout = float(arguments.pop("timeout", 0))
        arguments.setdefault("wait", self.QUIET)
        started = time.monotonic()
        host = (task_vars or {}).get("inventory_hostname", "host")
        said = ""
        gone_since = 0.0
        while True:
            try:
                answer = self._execute_module(
                    module_name="hf_snapshot", module_args=arguments, task_vars=task_vars
                )
                gone_since = 0.0
            except AnsibleConnectionFailure as error:
                gone_since = gone_since or time.monotonic()
                reason = str(error).splitlines()[0]
                if not said or time.monotonic() - gone_since > self.AWAY:
                    raise
                display.display(
                    f"[{host}] model: the host does not answer ({reason}), trying again"
                )
                time.sleep(5)
                self._connection.reset()
                continue
            waiting = (
                arguments.get("state", "present") == "present"
                and not answer.get("failed")
                and not answer.get("complete")
                and not self._task.check_mode
            )
            if not waiting:
                result.update(answer)
                return result
            if answer["progress"] != said:
                said = answer["progress"]
                display.display(f"[{host}] model: {said}")
            if timeout and time.monotonic() - started > timeout:
                raise AnsibleActionFail(
                    f"the model is not there after {timeout:.0f} s ({said}); it is still being "
                    "fetched: run again later, or set hf_model_wait_timeout"
                )
