// Probe is a static program for the sandbox's tests.
package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch args[0] {
	case "get":
		client := http.Client{Timeout: 20 * time.Second}
		response, err := client.Get(args[1])
		if err != nil {
			return err
		}
		defer response.Body.Close()
		_, err = io.Copy(os.Stdout, response.Body)
		return err
	case "serve": // the body on each of the addresses
		for _, address := range args[2:] {
			l, err := net.Listen("tcp", address)
			if err != nil {
				return err
			}
			go http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				io.WriteString(w, args[1])
			}))
		}
		fmt.Println("listening")
		select {}
	case "environ":
		fmt.Println(strings.Join(os.Environ(), "\n"))
		return nil
	}
	return fmt.Errorf("no command %s", args[0])
}
