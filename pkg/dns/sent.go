package dns

import (
	"encoding/binary"
	"hash/maphash"
	"math/rand/v2"
	"sync"
)

// sentSet remembers the queries that wait for an upstream, so that one that comes back as a client's is known: it
// would go round until nothing else could. Two programs that ask the same at the same time with the same ID are taken
// for that too, once in 65536 times.
type sentSet struct {
	mu   sync.Mutex
	seed maphash.Seed
	keys map[sentKey]int
}

type sentKey struct {
	id       uint16
	question uint64
}

// add copies the query, gives the copy a random ID and remembers it until done is called.
func (s *sentSet) add(query []byte, end int) (sent []byte, done func()) {
	sent = append(make([]byte, 0, len(query)), query...)
	binary.BigEndian.PutUint16(sent, uint16(rand.Uint32())) // ChaCha8, seeded by the operating system
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keys == nil {
		s.keys = make(map[sentKey]int)
		s.seed = maphash.MakeSeed()
	}
	key := s.key(sent, end)
	s.keys[key]++
	return sent, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.keys[key]--; s.keys[key] == 0 {
			delete(s.keys, key)
		}
	}
}

// has says whether the query is one that waits.
func (s *sentSet) has(query []byte, end int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.keys) == 0 {
		return false
	}
	return s.keys[s.key(query, end)] > 0
}

func (s *sentSet) key(m []byte, end int) sentKey {
	return sentKey{id: binary.BigEndian.Uint16(m), question: maphash.Bytes(s.seed, m[headerLen:end])}
}
