#!/bin/sh
# Stand-in of a CUDA binary tool: says its version and does nothing.
case "$1" in
--version | -V)
	echo "Cuda compilation tools, release @c@, V@nvcc@"
	echo "Build @id@"
	;;
*)
	echo "fatal   : The lab's stand-in does nothing" >&2
	exit 1
	;;
esac
