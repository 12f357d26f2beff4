// What the browser remembers: conversations, settings, theme. The API key is forgotten with the tab.

const NAME = "warpsmith";

function read(storage, name, fallback) {
  try { return JSON.parse(storage.getItem(`${NAME}.${name}`)) ?? fallback; } catch { return fallback; }
}

function write(storage, name, value) {
  try { storage.setItem(`${NAME}.${name}`, JSON.stringify(value)); return true; } catch { return false; }
}

export const store = {
  conversations: read(localStorage, "conversations", []),
  current: read(localStorage, "current", null),
  settings: read(localStorage, "settings", {}),
  theme: read(localStorage, "theme", "auto"),
  key: read(sessionStorage, "key", ""),

  save() {
    write(localStorage, "settings", this.settings);
    write(localStorage, "theme", this.theme);
    write(localStorage, "current", this.current);
    write(sessionStorage, "key", this.key);
    // when the browser has no more room, the oldest conversations go
    const kept = [...this.conversations];
    while (!write(localStorage, "conversations", kept) && kept.length > 1) kept.pop();
    this.conversations = kept;
  },

  get conversation() {
    return this.conversations.find((each) => each.id === this.current) ?? null;
  },

  begin() {
    const fresh = { id: crypto.randomUUID?.() ?? String(Date.now() + Math.random()), title: "New conversation", messages: [] };
    this.conversations.unshift(fresh);
    this.current = fresh.id;
    return fresh;
  },

  remove(id) {
    this.conversations = this.conversations.filter((each) => each.id !== id);
    if (this.current === id) this.current = this.conversations[0]?.id ?? null;
  },
};
