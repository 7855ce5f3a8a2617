/*
 * What Debian's user-mode Linux (6.1) lacks, loaded into it with LD_PRELOAD. Its guests' programs are processes of this
 * machine, which it traces with ptrace(2).
 *
 * A traced process whose tracer is killed is let go: the guest's programs would go on as programs of this machine, as
 * root, with system calls meant for the guest's kernel. So they are to be killed with their tracer.
 *
 * It keeps 2696 bytes of a process's extended registers, which is all that there is up to AVX-512 and PKRU. Processors
 * with AMX have more, and their kernels take the registers of a traced process whole or not at all: "ptrace set fp regs
 * failed, errno = 14". So what it writes is completed; the rest, which no program in the guest can have asked for, is
 * left in its initial state.
 *
 * When it is idle it looks whether there is something to do, and then sleeps until a signal. One that comes in between is
 * noted and not looked at before the next timer's: of some thousand packets one is late. So it does not sleep either
 * while one of its files has something new.
 *
 * It is built without a C library's headers, which the machine may not have.
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
static unsigned long whole; /* how much of the area this machine's kernel wants */

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
	/* The header's first word says which components are not in their initial state: those that were written. */
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

static int files = -1; /* the kernel's one epoll, which has all that it reads from */

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
