// Echo is the test server that runs in the lab's pods. Every port listens on IPv4 and IPv6.
//
//	8080/tcp  HTTP. Any path answers JSON: {"host", "remote", "method", "path", "query", "proto", "header"}.
//	          /hello answers "hello from HOST\n". /slow?seconds=N waits N seconds first (default 5).
//	          /upgrade/{echo,source,sink} answers 101 Switching Protocols and then carries raw bytes as the TCP
//	          servers below do.
//	9001/tcp  echo: sends back what it reads; a half-close is answered with a half-close.
//	9001/udp  echo, datagram by datagram.
//	9002/tcp  sink: reads until EOF, then closes. Sends nothing.
//	9003/tcp  source: sends zeros until the peer closes.
//	9004/tcp  speaks first: sends "hello from HOST\n" at once, then echoes.
//	9005/tcp  half-close: reads until EOF, waits, answers with the number of bytes read ("17\n"), closes. It waits as
//	          long as the first line says if that is "delay DURATION" ("delay 30s"), else not at all.
//	9006/tcp  reset: reads one byte, then resets the connection (RST).
//	9007/tcp  silent: accepts and reads, never answers, and closes only after the peer.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"
)

func main() {
	host, err := os.Hostname()
	if err != nil {
		log.Fatal(err)
	}
	failed := make(chan error)
	serve := func(port string, handle func(*net.TCPConn) error) {
		go func() { failed <- serveTCP(port, handle) }()
	}
	serve(":9001", echo)
	serve(":9002", func(c *net.TCPConn) error { _, err := io.Copy(io.Discard, c); return err })
	serve(":9003", func(c *net.TCPConn) error { return source(c) })
	serve(":9004", func(c *net.TCPConn) error {
		if _, err := fmt.Fprintf(c, "hello from %s\n", host); err != nil {
			return err
		}
		return echo(c)
	})
	serve(":9005", halfClose)
	serve(":9006", reset)
	serve(":9007", func(c *net.TCPConn) error { _, err := io.Copy(io.Discard, c); return err })
	go func() { failed <- echoUDP(":9001") }()
	go func() { failed <- http.ListenAndServe(":8080", handler(host)) }()
	log.Fatal(<-failed)
}

func handler(host string) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		err := json.NewEncoder(w).Encode(map[string]any{
			"host": host, "remote": r.RemoteAddr, "method": r.Method, "path": r.URL.Path,
			"query": r.URL.RawQuery, "proto": r.Proto, "header": r.Header, "authority": r.Host,
		})
		if err != nil {
			log.Print(err)
		}
	})
	mux.HandleFunc("/hello", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, "hello from %s\n", host) })
	mux.HandleFunc("/slow", func(w http.ResponseWriter, r *http.Request) {
		seconds := 5.0
		if s := r.URL.Query().Get("seconds"); s != "" {
			n, err := strconv.ParseFloat(s, 64)
			if err != nil {
				http.Error(w, "seconds is not a number", http.StatusBadRequest)
				return
			}
			seconds = n
		}
		select {
		case <-time.After(time.Duration(seconds * float64(time.Second))):
			fmt.Fprintln(w, host)
		case <-r.Context().Done():
		}
	})
	mux.HandleFunc("/upgrade/", upgrade)
	return mux
}

func upgrade(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Connection", "Upgrade")
	w.Header().Set("Upgrade", "raw")
	w.WriteHeader(http.StatusSwitchingProtocols)
	c, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		log.Print(err)
		return
	}
	defer c.Close()
	switch strings.TrimPrefix(r.URL.Path, "/upgrade/") {
	case "source":
		err = source(c)
	case "sink":
		_, err = io.Copy(io.Discard, buffered)
	default:
		_, err = io.Copy(c, buffered)
	}
	if err != nil {
		log.Print(err)
	}
}

func echo(c *net.TCPConn) error {
	if _, err := io.Copy(c, c); err != nil {
		return err
	}
	return c.CloseWrite()
}

func source(w io.Writer) error {
	zeros := make([]byte, 1<<17)
	for {
		if _, err := w.Write(zeros); err != nil {
			return err
		}
	}
}

func halfClose(c *net.TCPConn) error {
	r := bufio.NewReader(c)
	var delay time.Duration
	first, err := r.ReadString('\n') // io.EOF: an incomplete line is fine
	if err != nil && err != io.EOF {
		return err
	}
	if word, ok := strings.CutPrefix(first, "delay "); ok {
		if delay, err = time.ParseDuration(strings.TrimSpace(word)); err != nil {
			return err
		}
	}
	rest, err := io.Copy(io.Discard, r)
	if err != nil {
		return err
	}
	time.Sleep(delay)
	_, err = fmt.Fprintln(c, int64(len(first))+rest)
	return err
}

func reset(c *net.TCPConn) error {
	if _, err := c.Read(make([]byte, 1)); err != nil {
		return err
	}
	return c.SetLinger(0) // the close that follows sends RST
}

func serveTCP(address string, handle func(*net.TCPConn) error) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			if err := handle(c.(*net.TCPConn)); err != nil {
				log.Printf("%s: %v", address, err)
			}
		}()
	}
}

func echoUDP(address string) error {
	c, err := net.ListenPacket("udp", address)
	if err != nil {
		return err
	}
	b := make([]byte, 1<<16)
	for {
		n, from, err := c.ReadFrom(b)
		if err != nil {
			return err
		}
		if _, err := c.WriteTo(b[:n], from); err != nil {
			log.Printf("%s/udp: %v", address, err)
		}
	}
}
