/*
 * Preloaded into every process of the box: the kernel release and the module list are those of
 * the simulated kernel. A container shares the controller's kernel, and neither uname(2) nor
 * /proc/modules can be replaced by a mount (the latter does not even exist on a kernel without
 * modules). Both are read from files that the simulated boot writes; without them nothing changes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#define MODULES "/proc/modules"
#define OUR_MODULES "/run/vllm-turing-lab/proc-modules"
#define OUR_RELEASE "/run/vllm-turing-lab/uname"

static const char *redirect(const char *path)
{
	if (path && strcmp(path, MODULES) == 0 &&
	    syscall(SYS_faccessat, AT_FDCWD, OUR_MODULES, F_OK) == 0)
		return OUR_MODULES;
	return path;
}

/* The file holds two lines: release and version. */
int uname(struct utsname *name)
{
	char text[256];
	int rc = (int)syscall(SYS_uname, name);
	int fd = rc ? -1 : (int)syscall(SYS_openat, AT_FDCWD, OUR_RELEASE, O_RDONLY | O_CLOEXEC);

	if (fd >= 0) {
		ssize_t n = syscall(SYS_read, fd, text, sizeof(text) - 1);

		syscall(SYS_close, fd);
		if (n > 0) {
			char *release = text, *version, *end;

			text[n] = 0;
			version = strchr(text, '\n');
			if (version) {
				*version++ = 0;
				end = strchr(version, '\n');
				if (end)
					*end = 0;
				snprintf(name->release, sizeof(name->release), "%.64s", release);
				snprintf(name->version, sizeof(name->version), "%.64s", version);
			}
		}
	}
	return rc;
}

#define NEXT(function) \
	static __typeof__(&function) next; \
	if (!next) \
		next = (__typeof__(&function))dlsym(RTLD_NEXT, #function)

#define OPEN(function) \
	int function(const char *path, int flags, ...) \
	{ \
		mode_t mode = 0; \
		NEXT(function); \
		if (flags & (O_CREAT | __O_TMPFILE)) { \
			va_list args; \
			va_start(args, flags); \
			mode = va_arg(args, mode_t); \
			va_end(args); \
		} \
		return next(redirect(path), flags, mode); \
	}

#define OPENAT(function) \
	int function(int dir, const char *path, int flags, ...) \
	{ \
		mode_t mode = 0; \
		NEXT(function); \
		if (flags & (O_CREAT | __O_TMPFILE)) { \
			va_list args; \
			va_start(args, flags); \
			mode = va_arg(args, mode_t); \
			va_end(args); \
		} \
		return next(dir, redirect(path), flags, mode); \
	}

#define FOPEN(function) \
	FILE *function(const char *path, const char *mode) \
	{ \
		NEXT(function); \
		return next(redirect(path), mode); \
	}

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
FOPEN(fopen)
FOPEN(fopen64)

int access(const char *path, int mode)
{
	NEXT(access);
	return next(redirect(path), mode);
}

int stat(const char *path, struct stat *result)
{
	NEXT(stat);
	return next(redirect(path), result);
}

int stat64(const char *path, struct stat64 *result)
{
	NEXT(stat64);
	return next(redirect(path), result);
}
