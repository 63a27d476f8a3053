"""The logic of vllm-turing: pure functions and dataclasses, without any import of Ansible.

Modules in ``library/`` import it as ``ansible.module_utils.vllm_turing``; tests and the launcher
as ``vllm_turing``; the host gets the same files under ``{{ vllm_host_prefix }}/lib``. Only the
standard library is used, so that it runs with the host's own ``/usr/bin/python3``.
"""
