// `data-act` names what a click asks for, `data-address` the query of the page's address. The page says when it is
// hidden and seen again, so that streams end meanwhile: a browser keeps six connections to a server.
element.addEventListener('click', (event) => {
  const asked = event.target.closest('[data-act]');
  if (!asked || asked.getAttribute('aria-disabled') === 'true') return;
  event.preventDefault();
  trigger('act', {...asked.dataset});
});
watch('value', () => {
  const query = element.querySelector('[data-address]')?.dataset.address;
  if (query === undefined || query === location.search) return;
  history.replaceState(null, '', query || location.pathname);
});
document.addEventListener('visibilitychange', () => {
  if (!element.isConnected) return;
  if (document.hidden) trigger('hide'); else trigger('seen');
});
