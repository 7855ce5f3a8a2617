package hostservice

import (
	"encoding/xml"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
)

// values returns the text of the elements of a property list, in order.
func values(t *testing.T, text string) (out []string) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(text))
	for {
		token, err := d.Token()
		if err == io.EOF {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		switch token := token.(type) {
		case xml.StartElement:
			if token.Name.Local == "false" {
				out = append(out, "false")
			}
		case xml.CharData:
			if s := strings.TrimSpace(string(token)); s != "" {
				out = append(out, s)
			}
		}
	}
}

func TestJobOfLaunchd(t *testing.T) {
	for _, tt := range []struct {
		who    owner
		number int
		socket []string
		status api.HelperService
	}{
		{owner{user: "501"}, 501, []string{"SockPathMode", "384", "SockPathOwner", "501"}, api.HelperService{User: "501"}},
		{owner{group: "staff"}, 20, []string{"SockPathMode", "432", "SockPathGroup", "20"}, api.HelperService{Group: "staff"}},
	} {
		text := job("1.2.3 (3f2a91c04b7e)", tt.who, tt.number)
		want := append([]string{"Label", "kubevpn-helper", "ProgramArguments", Program, "helper",
			"inetdCompatibility", "Wait", "false", "Sockets", "Listeners", "SockPathName", Socket}, tt.socket...)
		want = append(want, "StandardErrorPath", logFile, "Umask", "63")
		if diff := cmp.Diff(want, values(t, text)); diff != "" {
			t.Errorf("-want +got\n%s", diff)
		}
		tt.status.Installed, tt.status.Version = true, "1.2.3 (3f2a91c04b7e)"
		tt.status.Socket, tt.status.Program, tt.status.Policy = Socket, Program, PolicyFile
		if diff := cmp.Diff(tt.status, parseUnit(text)); diff != "" {
			t.Errorf("status: -want +got\n%s", diff)
		}
	}
}
