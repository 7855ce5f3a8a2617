//go:build ignore

/* Prints the first IPv4 address of a name, by the resolver of the C library. */
#include <arpa/inet.h>
#include <netdb.h>
#include <stdio.h>
#include <sys/socket.h>

int main(int argc, char **argv)
{
	struct addrinfo hints = { .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM }, *all;
	char text[INET_ADDRSTRLEN];
	int failed = argc == 2 ? getaddrinfo(argv[1], 0, &hints, &all) : EAI_NONAME;
	if (failed) {
		fprintf(stderr, "%s\n", gai_strerror(failed));
		return 1;
	}
	for (; all; all = all->ai_next)
		if (all->ai_family == AF_INET) {
			puts(inet_ntop(AF_INET, &((struct sockaddr_in *)all->ai_addr)->sin_addr, text, sizeof text));
			return 0;
		}
	return 1;
}
