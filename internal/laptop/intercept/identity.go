package intercept

import (
	"crypto/ecdsa"
	"crypto/tls"
	"errors"

	"kubevpn/internal/api"
)

// identity authenticates the laptop to its agents. An agent reads the hash of the laptop's key from its environment;
// the laptop reads the hash of the agent's key from the agent's log. Neither needs a CA: a certificate only carries the
// public key.
type identity struct {
	certificate tls.Certificate
	hash        string
}

var errOtherAgent = errors.New("the peer does not have the agent's key")

func newIdentity(key *ecdsa.PrivateKey) (identity, error) {
	certificate, hash, err := api.SelfSigned(key)
	return identity{certificate, hash}, err
}

// tlsConfig returns the laptop's TLS configuration for the agent whose key has that hash.
func (i identity) tlsConfig(agent string) *tls.Config {
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{i.certificate},
		// Small first records would slow down a conn, which carries much data from the start.
		DynamicRecordSizingDisabled: true,
		// the agent's certificate is self-signed: VerifyConnection compares its key with the key in the agent's info
		InsecureSkipVerify: true,
		VerifyConnection: func(state tls.ConnectionState) error {
			// An info without a key names no agent, although the hash of a missing certificate would equal it.
			if agent == "" || api.PeerKeyHash(state) != agent {
				return errOtherAgent
			}
			return nil
		},
	}
}
