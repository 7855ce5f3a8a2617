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
 * It is built without a C library's headers, which the machine may not have.
 */
#include <stdarg.h>

enum { PEEKTEXT = 1, PEEKUSER = 3, OLDSETOPTIONS = 21, SETOPTIONS = 0x4200, GETREGSET = 0x4204, SETREGSET = 0x4205 };
enum { EXITKILL = 1 << 20 }; /* an option */
enum { XSTATE = 0x202 }; /* a set of registers */

struct iovec {
	void *base;
	unsigned long len;
};

extern int *__errno_location(void);

/* ptrace is the system call, which for PEEK* differs from the library's function. */
static long call(long request, long pid, long address, void *data)
{
	long result;
	register void *r10 __asm__("r10") = data;
	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"(101L), "D"(request), "S"(pid), "d"(address), "r"(r10)
			 : "rcx", "r11", "memory");
	return result;
}

static char area[1 << 16] __attribute__((aligned(64)));
static unsigned long whole; /* how much of the area this machine's kernel wants */

static long set(long pid, const struct iovec *part)
{
	struct iovec v = { area, sizeof(area) };
	if (whole == 0) {
		long result = call(GETREGSET, pid, XSTATE, &v);
		if (result < 0)
			return result;
		whole = v.len;
		__builtin_memset(area, 0, sizeof(area));
	}
	if (part->len >= whole)
		return call(SETREGSET, pid, XSTATE, (void *)part);
	__builtin_memcpy(area, part->base, part->len);
	/* The header's first word says which components are not in their initial state: those that were written. */
	*(unsigned long *)(area + 512) &= 0x2ff;
	v.len = whole;
	return call(SETREGSET, pid, XSTATE, &v);
}

long ptrace(long request, ...)
{
	va_list arguments;
	va_start(arguments, request);
	long pid = va_arg(arguments, int);
	long address = va_arg(arguments, long);
	void *data = va_arg(arguments, void *);
	va_end(arguments);

	long result, word;
	if (request == SETREGSET && address == XSTATE)
		result = set(pid, data);
	else if (request >= PEEKTEXT && request <= PEEKUSER)
		result = call(request, pid, address, &word);
	else if (request == SETOPTIONS || request == OLDSETOPTIONS)
		result = call(request, pid, address, (void *)((unsigned long)data | EXITKILL));
	else
		result = call(request, pid, address, data);
	if (result < 0) {
		*__errno_location() = -result;
		return -1;
	}
	if (request >= PEEKTEXT && request <= PEEKUSER) {
		*__errno_location() = 0;
		return word;
	}
	return result;
}
