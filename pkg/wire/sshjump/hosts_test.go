package sshjump

import (
	"slices"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for _, tt := range []struct {
		text string
		args string // "": rejected
	}{
		{"bastion", "-- bastion"},
		{"dev@bastion", "-l dev -- bastion"},
		{"dev@bastion.example.com:2222", "-p 2222 -l dev -- bastion.example.com"},
		{"a@realm@bastion", "-l a@realm -- bastion"},
		{"192.0.2.1:22", "-p 22 -- 192.0.2.1"},
		{"[2001:db8::1]", "-- 2001:db8::1"},
		{"[2001:db8::1]:22", "-p 22 -- 2001:db8::1"},
		{"a@one:1,two,b@[::1]:3", "-J a@one:1,two -p 3 -l b -- ::1"},
		{"one,[::1],two", "-J one,[::1] -- two"},
		{"-oProxyCommand=id", ""},
		{"-l@bastion", ""},
		{"dev@-v", ""},
		{"one,-v", ""},
		{"bastion,", ""},
		{"bastion:0", ""},
		{"bastion:65536", ""},
		{"bastion:ssh", ""},
		{"2001:db8::1", ""},
		{"[::1", ""},
		{"@bastion", ""},
		{"dev@", ""},
		{"b$(id)", ""},
		{"`id`@bastion", ""},
		{"dev;id@bastion", ""},
		{"a b", ""},
		{"bastion%h", ""},
	} {
		hosts, err := Parse(tt.text)
		if err != nil || tt.args == "" {
			if (err == nil) != (tt.args != "") {
				t.Errorf("%q: %v, %v", tt.text, hosts, err)
			}
			continue
		}
		if got := strings.Join(hosts.Arguments(), " "); got != tt.args {
			t.Errorf("%q: arguments %q, want %q", tt.text, got, tt.args)
		}
		again, err := Parse(hosts.String())
		if hosts.String() != tt.text || err != nil || !slices.Equal(again, hosts) {
			t.Errorf("%q: printed as %q", tt.text, hosts)
		}
	}
}

func TestParseAcceptsURLsAsSSHPrintsThem(t *testing.T) {
	hosts, err := Parse("ssh://dev@bastion:22,two")
	if err != nil || hosts.String() != "dev@bastion:22,two" {
		t.Error(hosts, err)
	}
	if none, err := Parse(""); none != nil || err != nil {
		t.Error(none, err)
	}
}
