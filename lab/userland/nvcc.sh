#!/bin/sh
# Stand-in nvcc: says its version as the real one does and compiles nothing.
case "$1" in
--version | -V)
	cat <<'TEXT'
nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) @copyright@ NVIDIA Corporation
Built on @built@
Cuda compilation tools, release @c@, V@nvcc@
Build @id@
TEXT
	;;
*)
	echo "nvcc fatal   : The lab's stand-in compiles nothing" >&2
	exit 1
	;;
esac
