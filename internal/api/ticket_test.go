package api

import (
	"strings"
	"testing"
)

func TestTicketHeaderParsesBack(t *testing.T) {
	session := [16]byte{0xfe, 1}
	ticket := Ticket{Secret: []byte("\xff\xfe0123456789012345678901234567??")}
	const want = "fe010000000000000000000000000000.__4wMTIzNDU2Nzg5MDEyMzQ1Njc4OTAxMjM0NTY3Pz8"
	got := ticket.HeaderValue(session)
	if got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	id, secret, err := ParseTicketHeader(got)
	if err != nil || id != session || string(secret[:]) != string(ticket.Secret) {
		t.Errorf("comes back as %x, %x, %v", id, secret, err)
	}
	for _, bad := range []string{
		"", ".", "a.b", got + "=", got[:len(got)-1], got[1:], " " + got, got + " ", strings.Replace(got, ".", "", 1),
		strings.Replace(got, "fe", "gg", 1), strings.Replace(got, "_", "/", 1), strings.Replace(got, "_", "\n", 1),
		got[:len(got)-1] + "9", // the same bytes in other words
	} {
		if _, _, err := ParseTicketHeader(bad); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

func FuzzTicketHeader(f *testing.F) {
	f.Add("fe010000000000000000000000000000.__4wMTIzNDU2Nzg5MDEyMzQ1Njc4OTAxMjM0NTY3Pz8")
	f.Add("FE010000000000000000000000000000.__4wMTIzNDU2Nzg5MDEyMzQ1Njc4OTAxMjM0NTY3Pz8")
	f.Add(strings.Repeat("0", 32) + "." + strings.Repeat("A", 43))
	f.Fuzz(func(t *testing.T, value string) {
		session, secret, err := ParseTicketHeader(value)
		if err != nil {
			return
		}
		// Of what is taken, only the case of hex digits is free.
		back := (&Ticket{Secret: secret[:]}).HeaderValue(session)
		if !strings.EqualFold(back[:32], value[:32]) || back[32:] != value[32:] {
			t.Errorf("%q comes back as %q", value, back)
		}
	})
}
