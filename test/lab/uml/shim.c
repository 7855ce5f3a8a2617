/*
 * The shim adds what Debian's user-mode Linux (6.1) lacks. It is loaded into it with LD_PRELOAD. The programs of the
 * guests are processes of this machine, which user-mode Linux traces with ptrace(2).
 *
 * The kernel releases a traced process whose tracer is killed. The guest's programs would continue as programs of this
 * machine, as root, with system calls meant for the guest's kernel. The shim makes the kernel kill them with their tracer.
 *
 * User-mode Linux keeps 2696 bytes of a process's extended registers, which is all of them up to AVX-512 and PKRU.
 * Processors with AMX have more, and their kernels accept the registers of a traced process only as a whole: "ptrace set
 * fp regs failed, errno = 14". The shim completes the registers that user-mode Linux writes. The others stay in their
 * initial state, because no program in the guest can have requested them.
 *
 * When user-mode Linux is idle, it checks for work, and then sleeps until a signal. If a signal arrives in between, it
 * handles that only at the next timer: one of some thousand packets is late. The shim therefore does not sleep while one
 * of its files has new data.
 *
 * The shim is built without a C library's headers, which the machine may not have.
 */
#include <stdarg.h>

enum { SYS_PTRACE = 101, SYS_EPOLL_CREATE = 213, SYS_PPOLL = 271 };
enum { PEEKTEXT = 1, PEEKUSER = 3, OLDSETOPTIONS = 21, SETOPTIONS = 0x4200, GETREGSET = 0x4204, SETREGSET = 0x4205 };
enum { EXITKILL = 1 << 20 }; /* an option */
enum { XSTATE = 0x202 }; /* a set of registers */

struct iovec {
	void *base;
	unsigned long len;
};

struct pollfd {
	int fd;
	short events, revents;
};

extern int *__errno_location(void);

static long system(long number, long a, long b, long c, const void *d, long e)
{
	long result;
	register const void *r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
			 : "rcx", "r11", "memory");
	return result;
}

static long told(long result)
{
	if (result >= 0)
		return result;
	*__errno_location() = -result;
	return -1;
}

/* ptrace is the system call, which for PEEK* differs from the library's function. */
static long trace(long request, long pid, long address, const void *data)
{
	return system(SYS_PTRACE, request, pid, address, data, 0);
}

static char area[1 << 16] __attribute__((aligned(64)));
static unsigned long whole; /* the size of the area that this machine's kernel requires */

static long set(long pid, const struct iovec *part)
{
	struct iovec v = { area, sizeof(area) };
	if (whole == 0) {
		long result = trace(GETREGSET, pid, XSTATE, &v);
		if (result < 0)
			return result;
		whole = v.len;
		__builtin_memset(area, 0, sizeof(area));
	}
	if (part->len >= whole)
		return trace(SETREGSET, pid, XSTATE, part);
	__builtin_memcpy(area, part->base, part->len);
	/* The header's first word lists the components that are not in their initial state: those that were written. */
	*(unsigned long *)(area + 512) &= 0x2ff;
	v.len = whole;
	return trace(SETREGSET, pid, XSTATE, &v);
}

long ptrace(long request, ...)
{
	va_list arguments;
	va_start(arguments, request);
	long pid = va_arg(arguments, int);
	long address = va_arg(arguments, long);
	void *data = va_arg(arguments, void *);
	va_end(arguments);

	if (request == SETREGSET && address == XSTATE)
		return told(set(pid, data));
	if (request == SETOPTIONS || request == OLDSETOPTIONS)
		return told(trace(request, pid, address, (void *)((unsigned long)data | EXITKILL)));
	if (request < PEEKTEXT || request > PEEKUSER)
		return told(trace(request, pid, address, data));
	long word;
	long result = trace(request, pid, address, &word);
	if (result < 0)
		return told(result);
	*__errno_location() = 0;
	return word;
}

static int files = -1; /* the only epoll of user-mode Linux, with all files that it reads */

int epoll_create(int size)
{
	files = told(system(SYS_EPOLL_CREATE, size, 0, 0, 0, 0));
	return files;
}

int sigsuspend(const void *mask)
{
	struct pollfd p = { files, 1 /* POLLIN */, 0 };
	system(SYS_PPOLL, (long)&p, 1, 0, mask, 8);
	return told(-4 /* EINTR */);
}
