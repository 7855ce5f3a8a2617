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
 * User-mode Linux writes these registers at each system call and page fault of a guest's program, though they seldom
 * change in between. The kernel maps memory for each write, which can take as long as all the rest together, and guests
 * disturb each other with it. The shim remembers a stopped process's registers, and writes only others, once.
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
enum { CONT = 7, SINGLESTEP = 9, SYSCALL = 24, SYSEMU = 31, SYSEMU_SINGLESTEP = 32 }; /* with these, a process runs */
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

/*
 * known has the extended registers of a stopped process. A write waits until the process runs a program of the guest:
 * user-mode Linux also has it run its own stub, which maps memory and leaves these registers alone.
 *
 *	       read or write                 CONT without a signal: the stub runs
 *	len 0 ---------------> len > 0, waits if written <--+
 *	  ^                       |  |______________________|
 *	  +-----------------------+
 *	   the program runs, or a new process begins
 */
static struct known {
	long pid;
	unsigned long len; /* of the registers; 0: they are not known */
	int waits;	   /* the process does not have them yet */
	char registers[4096];
} known[1024];

static long settle(struct known *k)
{
	struct iovec v = { k->registers, k->len };
	int waits = k->waits;
	k->len = k->waits = 0;
	return waits ? set(k->pid, &v) : 0;
}

/* of returns what is known of a process. */
static struct known *of(long pid)
{
	struct known *k = &known[pid & 1023];
	if (k->pid != pid) {
		settle(k); /* another process, which may have ended */
		k->pid = pid;
	}
	return k;
}

static void learn(struct known *k, const struct iovec *v, int waits)
{
	k->len = v->len;
	k->waits = waits;
	__builtin_memcpy(k->registers, v->base, v->len);
}

static long get_registers(struct known *k, struct iovec *v)
{
	long result = 0;
	if (k->len > 0) {
		v->len = k->len < v->len ? k->len : v->len;
		__builtin_memcpy(v->base, k->registers, v->len);
	} else if ((result = trace(GETREGSET, k->pid, XSTATE, v)) >= 0 && v->len <= sizeof(k->registers)) {
		learn(k, v, 0);
	}
	return result;
}

static long set_registers(struct known *k, const struct iovec *v)
{
	if (v->len > sizeof(k->registers))
		return set(k->pid, v);
	if (k->len == 0 || k->len > v->len || __builtin_memcmp(v->base, k->registers, k->len) != 0)
		learn(k, v, 1);
	return 0;
}

long ptrace(long request, ...)
{
	va_list arguments;
	va_start(arguments, request);
	long pid = va_arg(arguments, int);
	long address = va_arg(arguments, long);
	void *data = va_arg(arguments, void *);
	va_end(arguments);
	struct known *k = of(pid);
	long result = 0, word;

	switch (request) {
	case GETREGSET:
		return told(address == XSTATE ? get_registers(k, data) : trace(request, pid, address, data));
	case SETREGSET:
		return told(address == XSTATE ? set_registers(k, data) : trace(request, pid, address, data));
	case SETOPTIONS:
	case OLDSETOPTIONS: /* a new process, which may have the ID of an ended one */
		k->len = k->waits = 0;
		return told(trace(request, pid, address, (void *)((unsigned long)data | EXITKILL)));
	case CONT:
		if (data != 0)
			result = settle(k);
		break;
	case SINGLESTEP:
	case SYSCALL:
	case SYSEMU:
	case SYSEMU_SINGLESTEP:
		result = settle(k);
	}
	if (result < 0)
		return told(result);
	if (request < PEEKTEXT || request > PEEKUSER)
		return told(trace(request, pid, address, data));
	if ((result = trace(request, pid, address, &word)) < 0)
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
